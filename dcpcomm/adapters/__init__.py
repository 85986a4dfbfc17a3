"""What engines and compilers expect a merge to look like. Nothing is imported or registered until one of them is."""
