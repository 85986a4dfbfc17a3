"""Other ways to merge, to measure ours against: see README.md here."""
