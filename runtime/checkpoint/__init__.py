"""Checkpoints: saved by boxes, complete or not there, resumed under any pool and number of ranks."""
