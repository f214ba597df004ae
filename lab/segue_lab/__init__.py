"""Tools of segue's repository that serving does not need: the simulator, and the calculation of `advise`."""
