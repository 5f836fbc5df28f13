"""The program on the owner's machine: takes the work that is routed to it, starts the owner's agent, reports."""
