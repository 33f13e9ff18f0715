"""The engines, one file each: installation, conversion of the model, and how requests are sent."""
