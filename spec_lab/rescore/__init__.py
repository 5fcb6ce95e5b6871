"""What another deterministic rule would have accepted in a recorded run: verify rows, kept and judged again."""
