"""What a coordinator costs as workers grow in number: the pure core alone, and a server over real
sockets.
"""
