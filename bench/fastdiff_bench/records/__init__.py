"""Records of measurements, and their tables, charts and README sections."""
