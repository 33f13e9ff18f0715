// kube is all of Kubernetes and etcd in one program. The name of the symlink by which it is called, or its first
// argument (`kube kubectl get pods`), selects the component.
//
// Kubernetes publishes Go modules, so a machine that reaches a Go module proxy but no image registry can build it.
// The components share nearly all of their code, which is linked, stored and loaded once in a single program.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubeadm "k8s.io/kubernetes/cmd/kubeadm/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	if !isComponent(os.Args[0]) && len(os.Args) > 1 {
		os.Args = os.Args[1:]
	}
	switch name := filepath.Base(os.Args[0]); name {
	case "etcd":
		etcdmain.Main(append([]string{"etcd"}, os.Args[1:]...))
	case "kindnet":
		exitOn(kindnet(context.Background()))
	case "kubeadm":
		exitOn(kubeadm.Run())
	case "kubectl":
		exitOn(cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()))
	default:
		newCommand, ok := servers[name]
		if !ok {
			exitOn(fmt.Errorf("kube: no component named %q", name))
		}
		os.Exit(cli.Run(newCommand()))
	}
}

// Only the requested command is created: commands register the same feature gates and metrics, and two would conflict.
var servers = map[string]func() *cobra.Command{
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kube-proxy":              proxy.NewProxyCommand,
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func isComponent(path string) bool {
	name := filepath.Base(path)
	return servers[name] != nil || slices.Contains([]string{"etcd", "kindnet", "kubeadm", "kubectl"}, name)
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
