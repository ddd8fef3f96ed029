"""The page that ``bench report`` writes: its tables, charts and style."""
