"""The UNet of IDDPM and ADM."""
