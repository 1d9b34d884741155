// version.h: the one version string of every Fullband program.
#ifndef FULLBAND_COMMON_VERSION_H
#define FULLBAND_COMMON_VERSION_H

#define FULLBAND_VERSION "0.1.0"

#endif
