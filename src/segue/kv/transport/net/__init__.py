"""Parts that every transport with sockets shares."""
