"""What the course teaches: each algorithm once, short and complete. The notebooks quote it."""
