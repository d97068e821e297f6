"""Ray itself: nodes that we start, and connections to clusters."""
