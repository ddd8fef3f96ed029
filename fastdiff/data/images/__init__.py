"""Images: where they come from, and how they are decoded."""
