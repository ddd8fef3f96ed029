"""The Python interface: ``fastdiff.train``, ``fastdiff.Run``, ``fastdiff.preset`` and ``fastdiff.Config``."""
