"""Plain ``torch.nn.Module`` classes of users, as networks of fastdiff."""
