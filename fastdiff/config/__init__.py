"""What a run is: every option, its defaults and its checks. Free of torch."""
