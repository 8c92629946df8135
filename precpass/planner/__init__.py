"""From a policy and the analyses of a program to a plan."""
