"""Logits rules, one a file: penalties, warpers and bans that change the scores of the next token."""
