"""fastdiff: train diffusion models from sharded latents, fast, at any scale."""

from fastdiff.standard_streams import open_closed_descriptors

__version__ = "0.2.0"

open_closed_descriptors()  # before an import opens a file
