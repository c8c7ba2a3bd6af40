"""Passes: functions from graph to graph, from a captured program to one executable per rank."""
