"""Published training scripts, rendered, and the runs of fastdiff that replace them."""
