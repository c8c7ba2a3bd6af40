"""Decisions: which strategy a step uses, and who gets which sequence. Alone imports cvxpy; never imports torch."""
