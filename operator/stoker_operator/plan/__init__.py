"""Decides, before anything is scheduled, what a spec will run on and how. Pure."""
