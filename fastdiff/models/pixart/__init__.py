"""The text DiT of PixArt-alpha and PixArt-Sigma."""
