"""Image sources (folders, tars, Hugging Face data sets) and decoders."""
