"""Commands about machines: what one has, and which a run needs."""
