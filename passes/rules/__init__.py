"""Sharding rules: one per operator, written as correspondences of dims."""
