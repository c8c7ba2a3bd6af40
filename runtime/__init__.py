"""Does: the only layer that creates process groups, communicates and reads the clock."""
