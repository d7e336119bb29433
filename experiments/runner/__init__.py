"""Running experiments: settings, output folders, runs that resume, many runs side by side."""
