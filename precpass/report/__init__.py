"""What a policy did to a program, for people: built on plans, graphs and measurements."""
