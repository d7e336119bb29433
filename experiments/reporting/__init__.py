"""What experiments report: statistics, tables, plots, summaries, and the pages of docs/results."""
