"""Programs of a screen; see README.md."""
