"""Level 0: values and tables, and the pages, completions and folders that are compared with the code. Nothing runs."""
