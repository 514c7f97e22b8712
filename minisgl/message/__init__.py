"""Typed messages between the processes; they encode and decode themselves."""
