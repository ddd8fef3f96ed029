"""Code of users: files and installed packages that extend fastdiff, and the promises that they must keep."""
