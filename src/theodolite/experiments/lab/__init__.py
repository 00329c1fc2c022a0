"""What the chapters share beside the framework: data sets with their stand-ins, networks, descents, fits and panels."""
