"""Every number the paper reports: accuracy and its company, few-shot, transfer suites, models side by side."""
