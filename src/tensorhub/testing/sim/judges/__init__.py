"""What judges a simulated world, from outside: by what memory holds, and by how calls end."""
