"""One script a peer; each runs alone in its own process and prints one JSON object of rates."""
