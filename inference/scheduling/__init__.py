"""Parts of the scheduler: live settings, the fair waiting queue, finish rules. No torch."""
