"""From a list of drafters and rules to the tables of a paper: a resumable study, a JSON file, and tables and
figures."""
