"""The engines that an endpoint may run: one file each, behind one seam (`runtime.Runtime`). Pure."""
