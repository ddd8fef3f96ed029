"""Data in the layouts of kohya's sd-scripts: folders ``N_name``, and configurations of data sets in TOML or JSON."""
