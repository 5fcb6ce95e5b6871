"""`python -m spec_lab.doctor drafter=...`: finds out why acceptance is low. What it checks: docs/doctor.md."""
