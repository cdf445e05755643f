"""Drafts: tokens that may follow, proposed cheaply and verified several in one step."""
