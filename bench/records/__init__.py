"""Records of measurements, and what is made of them: tables, charts, README sections."""
