"""Makes a paper's tables and figures from a list of drafters and rules, by a resumable study and a JSON file."""
