"""The report: one HTML file with everything inside."""
