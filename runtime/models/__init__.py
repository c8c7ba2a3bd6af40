"""Models that the command line can train by name; plain `nn.Module`s that know nothing of this project."""
