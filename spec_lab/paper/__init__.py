"""From a list of drafters and rules to the tables of a paper: one resumable study, one JSON, and what is made of it."""
