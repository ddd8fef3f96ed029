"""Parts of a pipeline that another package has: text encoder, autoencoder, network (``test_other_packages.py``)."""
