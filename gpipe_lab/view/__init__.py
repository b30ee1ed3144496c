"""Pictures and panels. Nothing else imports this folder; it takes schedules, traces and memory reports."""
