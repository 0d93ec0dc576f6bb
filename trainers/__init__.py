"""What the configurations of other trainers say, in the words of this one."""
